-- Which calls of an attempt were not served.

ALTER TABLE attempts ADD COLUMN refusals TEXT;  -- JSON {code: the first refusal's words}; NULL: none

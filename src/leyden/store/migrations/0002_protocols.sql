-- How a call came, and what later calls may refer to.

ALTER TABLE turns ADD COLUMN protocol TEXT NOT NULL DEFAULT 'openai-chat';
ALTER TABLE turns ADD COLUMN streamed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE turns ADD COLUMN tools INTEGER NOT NULL DEFAULT 0; -- how many tools were offered
ALTER TABLE turns ADD COLUMN messages BLOB;                    -- zstd JSON {"after": turn_id or null, "messages": [...]}

-- Attempts that lived through an outage of the gateway, and may have noticed it.

ALTER TABLE attempts ADD COLUMN outage INTEGER; -- the turn that a call must continue first (0: a grader's turn); NULL: nothing was missed

-- Stores the response of a claimed key. One row: whether this grant had claimed it.
-- $1 scope, $2 key, $3 token, $4 owner, $5 response
select fencerow.record($1, $2, $3, $4, $5)

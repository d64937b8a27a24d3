-- Admits the transaction, or raises. See fencerow.admit().
-- $1 resource, $2 token, $3 owner
select fencerow.admit($1, $2, $3)

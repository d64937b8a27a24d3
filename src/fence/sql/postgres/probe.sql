-- Whether this is the transaction that was admitted; 25P02 where it has failed.
-- $1 resource, $2 token, $3 owner
select fencerow.admitted($1, $2, $3)

-- $1 resource, $2 owner, $3 token
-- One row: whether the lease was the owner's.
select fencerow.seed_lease($1, $2, $3)

-- $1 resource, $2 owner, $3 time to live in ms
-- One row: whether the lease was the owner's.
select fencerow.renew_lease($1, $2, $3)

-- $1 resource, $2 owner
-- One row: whether the lease was the owner's.
select fencerow.disown_lease($1, $2)

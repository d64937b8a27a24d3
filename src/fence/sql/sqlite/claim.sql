-- Takes an idempotency key, unless it is taken.
-- $1 scope, $2 key, $3 fingerprint, $4 resource, $5 token, $6 owner
insert into fencerow_idempotency (scope, key, fingerprint, resource, token, owner, claimed_at)
values ($1, $2, $3, $4, $5, $6, strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
on conflict (scope, key) do nothing

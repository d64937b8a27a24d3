-- Lifts the fence; the caller has checked that it goes up. $1 resource, $2 token, $3 owner
insert into fencerow_fence (resource, last_token, owner, raised_at)
values ($1, $2, $3, strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
on conflict (resource) do update
   set last_token = excluded.last_token,
       owner = excluded.owner,
       raised_at = excluded.raised_at
 where last_token < excluded.last_token

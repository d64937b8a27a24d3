-- ?1 resource, ?2 counter or null, ?3 owner, ?4 token or null, ?5 boot, ?6 end in ms of that boot,
-- ?7 time to live in ms, ?8 since in ms of the epoch, ?9 host, ?10 process, ?11 label
--
-- Invariant: only inside `begin immediate`, after the row was found to be free or run out.
insert into lease (resource, counter, owner, token, boot, ends_ms, ttl_ms, since_ms, host, process, label)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)
on conflict (resource) do update
   set counter = excluded.counter,
       owner = excluded.owner,
       token = excluded.token,
       boot = excluded.boot,
       ends_ms = excluded.ends_ms,
       ttl_ms = excluded.ttl_ms,
       since_ms = excluded.since_ms,
       host = excluded.host,
       process = excluded.process,
       label = excluded.label

-- The fence: what the database remembers of each resource, and the rules by which it refuses.
--
-- Order of locks, the same everywhere: first the advisory lock on the resource (shared to admit,
-- exclusive to raise), which queues fairly; then the fence row. The advisory lock alone is no
-- check, since a statement's snapshot may be older than its wait; the row lock alone is no queue,
-- since a stream of overlapping share locks starves whoever wants to raise. Both are needed.
--
-- Errors of the fence's own, by SQLSTATE:
--   ZF001  stale: an older token, or the same one of another owner; DETAIL is the token seen
--   ZF002  not raised: the fence stands below the token, or was raised in this very transaction
--   ZF003  not admitted: this transaction was not, or is not the one that was
--   ZF004  invalid argument
--   ZF005  no epoch is left
--   ZF006  an idempotency key was claimed, and no response was recorded for it; DETAIL is the key

-- Few rows, all of them hot: room on each page for heap-only updates, and a vacuum that comes
-- soon. Nothing but the name is indexed, for the same reason.
create table fencerow.fence (
    resource   text collate "C" not null,
    last_token bigint not null,
    owner      uuid not null,
    raised_in  xid8 not null,
    raised_at  timestamptz not null,
    constraint fence_pkey primary key (resource),
    constraint fence_resource_length check (octet_length(resource) between 1 and 512),
    constraint fence_token_positive check (last_token > 0)
) with (
    fillfactor = 50,
    autovacuum_vacuum_threshold = 100,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);

comment on table fencerow.fence is
    'The newest (token, owner) raised for each resource. It only goes forward; deleting a row lets old holders in.';

-- The advisory lock of a resource. Two resources with the same key merely wait for each other.
create function fencerow.lock_key(resource text)
returns bigint
language sql
immutable
parallel safe
as $$
    select pg_catalog.hashtextextended($1, 20051)
$$;

create function fencerow.check_grant(resource text, token bigint, owner uuid)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    if $1 is null or $2 is null or $3 is null or $2 <= 0 or octet_length($1) not between 1 and 512 then
        raise exception using
            errcode = 'ZF004',
            message = 'a grant is a resource of 1 to 512 bytes, a positive token and an owner';
    end if;
end
$$;

-- Refuses a token as stale. Never returns.
create function fencerow.refuse(resource text, token bigint, seen bigint)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'ZF001',
        message = format(
            case when $2 = $3
                then 'stale fencing token %s for %L: another owner has it'
                else 'stale fencing token %s for %L: the fence stands at %s'
            end, $2, $1, $3),
        detail = $3::text,
        hint = 'A newer holder has taken over. Stop; a new lease is needed.';
end
$$;

-- Whether the fence stands at exactly this token and owner, by a plain read. False if it stands
-- below or there is none. Raises ZF001 if it stands above: a fence only goes forward, so a
-- committed higher token is an answer that needs no lock.
create function fencerow.stands_at(resource text, token bigint, owner uuid)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    seen record;
begin
    select f.last_token, f.owner into seen
      from fencerow.fence f
     where f.resource = $1;
    if not found or seen.last_token < $2 then
        return false;
    end if;
    if seen.last_token > $2 or seen.owner <> $3 then
        perform fencerow.refuse($1, $2, seen.last_token);
    end if;
    return true;
end
$$;

-- Where the fence stands; null if there is none.
create function fencerow.standing(resource text)
returns bigint
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
    select f.last_token from fencerow.fence f where f.resource = $1
$$;

-- Waits until no admitted transaction of the resource is open, and keeps new ones from beginning
-- until this transaction ends. True then; false if it turned out that the fence stands at the
-- grant already. With a token it raises ZF001 if a newer grant came first.
--
-- A client that is stopped inside its transaction would keep it open for ever, and no limit of the
-- server's ends every kind of it (one that streams a result over a unix socket, or sits in COPY).
-- So when the wait has lasted patience_ms and end_blockers is true, the backends that hold the
-- lock are ended, as far as the caller's role may; each is reported by a warning. Then it waits
-- again, five times a quarter of the patience. Nobody is ended once the fence has moved, since
-- whoever holds the lock then may be newer than the caller; nor a raise whose commit waits for a
-- standby. Raises 55P03 if the lock is still held in the end; DETAIL lists the backends.
--
-- It runs with the caller's rights: a role may end its own backends. It needs READ COMMITTED, where
-- each look at the fence is a new one.
create function fencerow.wait_alone(
    resource text,
    token bigint,
    owner uuid,
    patience_ms integer,
    end_blockers boolean
)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    key        constant bigint := fencerow.lock_key($1);
    stood_at   constant bigint := fencerow.standing($1);
    lock_limit constant text := current_setting('lock_timeout');
    wait_ms    integer := greatest($4, 1);
    holders    integer[];
    holder     integer;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using
            errcode = 'ZF004',
            message = 'a fence is raised at READ COMMITTED only';
    end if;
    for round in 1 .. 6 loop
        begin
            perform set_config('lock_timeout', wait_ms || 'ms', true);
            perform pg_advisory_xact_lock(key);
            perform set_config('lock_timeout', lock_limit, true);
            return true;
        exception when lock_not_available then
            -- The holders first, then the fence: if it has not moved by now, they are older.
            select coalesce(array_agg(distinct l.pid), '{}') into holders
              from pg_locks l
              left join pg_stat_activity a on a.pid = l.pid
             where l.locktype = 'advisory'
               and l.database = (select d.oid from pg_database d where d.datname = current_database())
               and l.classid = ((key >> 32) & 4294967295)::oid
               and l.objid = (key & 4294967295)::oid
               and l.objsubid = 1
               and l.granted
               and l.pid <> pg_backend_pid()
               and a.wait_event is distinct from 'SyncRep';
            if $2 is not null and fencerow.stands_at($1, $2, $3) then
                return false;
            end if;
            if round = 6 or not $5 then
                raise exception using
                    errcode = 'lock_not_available',
                    message = format('%L is still being written to under an older grant', $1),
                    detail = format('held by backends %s', holders);
            end if;
            if fencerow.standing($1) is not distinct from stood_at then
                foreach holder in array holders loop
                    begin
                        if pg_terminate_backend(holder) then
                            raise warning 'fencerow: ended backend %, which held up a newer grant on %', holder, quote_literal($1);
                        end if;
                    exception when insufficient_privilege then
                        raise warning 'fencerow: may not end backend %, which holds up a newer grant on %', holder, quote_literal($1);
                    end;
                end loop;
            end if;
            wait_ms := greatest($4 / 4, 50);
        end;
    end loop;
end
$$;

-- Writes the fence row; the caller holds the resource's advisory lock exclusively.
create function fencerow.lift(resource text, token bigint, owner uuid)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform pg_advisory_xact_lock(fencerow.lock_key($1));
    -- A raise that a crash forgets would let an older holder in.
    if current_setting('synchronous_commit') in ('off', 'local') then
        perform set_config('synchronous_commit', 'on', true);
    end if;
    insert into fencerow.fence as f (resource, last_token, owner, raised_in, raised_at)
    values ($1, $2, $3, pg_current_xact_id(), clock_timestamp())
    on conflict on constraint fence_pkey do update
       set last_token = excluded.last_token,
           owner = excluded.owner,
           raised_in = excluded.raised_in,
           raised_at = excluded.raised_at
     where f.last_token < excluded.last_token;
    if not found then
        perform fencerow.stands_at($1, $2, $3);
    end if;
end
$$;

-- Lifts the fence to a grant, or refuses it with ZF001.
--
-- Once this is *committed*, no transaction of an older grant is open, none can begin, and a
-- rollback of what follows does not forget it. So commit it by itself, before the transaction
-- that is to be admitted; admit() insists. A fence that already stands there is left alone, and
-- waits for nobody.
create function fencerow.raise(
    resource text,
    token bigint,
    owner uuid,
    patience_ms integer default 2000,
    end_blockers boolean default true
)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    perform fencerow.check_grant($1, $2, $3);
    if not fencerow.stands_at($1, $2, $3) and fencerow.wait_alone($1, $2, $3, $4, $5) then
        perform fencerow.lift($1, $2, $3);
    end if;
end
$$;

-- The first token of the resource's next epoch: above the fence, and above the counter given.
create function fencerow.next_epoch(resource text, owner uuid, counter bigint)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    seen record;
    last bigint := coalesce($3, 0);
begin
    select f.last_token, f.owner into seen
      from fencerow.fence f
     where f.resource = $1;
    if found then
        if seen.owner = $2 and seen.last_token > last then
            return seen.last_token;    -- asked again after a lost answer
        end if;
        last := greatest(last, seen.last_token);
    end if;
    if last = 0 then
        return 1;
    end if;
    if last >> 32 >= 2147483647 then
        raise exception using errcode = 'ZF005', message = format('no epoch is left for %L', $1);
    end if;
    return ((last >> 32) + 1) << 32;
end
$$;

-- Issues owner the first token of the next epoch and raises the fence by it, for a lock service
-- whose counter may have forgotten. counter is what that counter holds, if anything.
--
-- Once this is committed, every token issued before is refused, those that were never used as well.
create function fencerow.renumber(
    resource text,
    owner uuid,
    counter bigint default null,
    patience_ms integer default 2000,
    end_blockers boolean default true
)
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    token bigint;
begin
    perform fencerow.check_grant($1, coalesce($3, 1), $2);
    perform fencerow.wait_alone($1, null, null, $4, $5);
    token := fencerow.next_epoch($1, $2, $3);
    perform fencerow.lift($1, token, $2);
    return token;
end
$$;

-- What admit() leaves behind, for admitted() to find: bound to this very transaction. It is inlined
-- where it is called, so it names everything in full and sets nothing.
create function fencerow.admission(resource text, token bigint, owner uuid)
returns text
language sql
volatile
as $$
    select pg_catalog.concat_ws(':', pg_catalog.pg_current_xact_id_if_assigned(), $2, $3, $1)
$$;

-- Admits this transaction under a grant; by itself, as its very first statement.
--
-- Once this has returned, the fence cannot be raised until the transaction ends, and nothing that
-- is read from here on is changed by an older holder afterwards. Raises ZF001 if the grant is
-- stale, ZF002 if it was not raised before, 40001 above READ COMMITTED if a raise came between
-- (begin again).
create function fencerow.admit_first(resource text, token bigint, owner uuid)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    seen record;
begin
    perform pg_advisory_xact_lock_shared(fencerow.lock_key($1));
    select f.last_token, f.owner, f.raised_in into seen
      from fencerow.fence f
     where f.resource = $1
       for share;
    if seen.last_token = $2 and seen.owner = $3 and seen.raised_in <> pg_current_xact_id() then
        perform set_config('fencerow.admitted', fencerow.admission($1, $2, $3), true);
        return;
    end if;

    perform fencerow.check_grant($1, $2, $3);
    if seen.last_token is null or seen.last_token < $2 then
        raise exception using
            errcode = 'ZF002',
            message = format('the fence of %L stands below %s: raise it first', $1, $2);
    end if;
    if seen.last_token > $2 or seen.owner <> $3 then
        perform fencerow.refuse($1, $2, seen.last_token);
    end if;
    raise exception using
        errcode = 'ZF002',
        message = format('the fence of %L was raised in this very transaction: a rollback would forget it', $1),
        hint = 'Commit fencerow.raise() by itself, then begin.';
end
$$;

-- Admits this transaction under a grant, as admit_first() does; to be its first statement.
--
-- It cannot be sure to be that, so it makes sure that it is not inside a savepoint (or a plpgsql
-- block with an exception clause), whose rollback would lift the admission without a trace: only
-- the outermost level of a transaction may export its snapshot. Raises 25001 otherwise.
create function fencerow.admit(resource text, token bigint, owner uuid)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    perform pg_export_snapshot();
    perform fencerow.admit_first($1, $2, $3);
end
$$;

-- Whether this is the transaction that was admitted under the grant.
create function fencerow.admitted(resource text, token bigint, owner uuid)
returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $$
    select coalesce(current_setting('fencerow.admitted', true), '') = fencerow.admission($1, $2, $3)
$$;

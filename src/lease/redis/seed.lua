-- Gives an unnumbered grant its token, and lets the counter go on from there.
--
-- KEYS[1]  the lock
-- KEYS[2]  the token counter
-- KEYS[3]  the run that the counter was last seeded in: the server's run_id and replication id
-- ARGV[1]  owner
-- ARGV[2]  the token that was issued for it, decimal
-- ARGV[3]  how long an unused counter is kept, in milliseconds, or '' for ever
--
-- Result   1 if the lock is the owner's, else 0 and nothing was written
-- Error    FENCEROW where the counter is no number; nothing was written
--
-- Invariant: a counter never goes back, and the lock's end stays where it is. Decimal texts are
-- compared by length and then by their bytes: as Lua numbers they would be rounded.

local lock = redis.call('GET', KEYS[1])
if not lock or string.sub(lock, 1, 36) ~= ARGV[1] then
    return 0
end

local counter = redis.call('GET', KEYS[2])
if counter and not string.match(counter, '^[1-9]%d*$') then
    return redis.error_reply('FENCEROW the token counter is not a positive integer')
end
if not counter or #counter < #ARGV[2] or (#counter == #ARGV[2] and counter < ARGV[2]) then
    redis.call('SET', KEYS[2], ARGV[2])
end
-- As in acquire.lua.
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
    .. ':' .. (string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or '')
redis.call('SET', KEYS[3], run)
if ARGV[3] ~= '' then
    redis.call('PEXPIRE', KEYS[2], ARGV[3])
    redis.call('PEXPIRE', KEYS[3], ARGV[3])
end
local since_and_origin = string.match(lock, '^%S+ %S+ (.*)$')
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[2] .. ' ' .. since_and_origin, 'KEEPTTL')
return 1

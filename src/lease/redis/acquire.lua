-- Takes a lock if it is free, and counts its token up in the same step.
--
-- KEYS[1]  the lock: '<owner> <token> <since, ms> <origin>'; the token is '-' while it has no number
-- KEYS[2]  the token counter
-- KEYS[3]  the run that the counter was last seeded in: the server's run_id and replication id
-- ARGV[1]  owner, 36 characters
-- ARGV[2]  time to live in milliseconds, 1 to 2^53 - 1
-- ARGV[3]  origin, a JSON object
-- ARGV[4]  how long an unused counter is kept, in milliseconds, or '' for ever
--
-- Result   {'granted', token}
--          {'unnumbered', counter, or '' if there is none}
--          {'held', milliseconds left, or -1 if it has no end}
-- Error    FENCEROW where the counter cannot count on, WRONGTYPE where a key is somebody else's
--
-- Invariant: an error leaves no lock behind, so everything that can fail comes before SET; a
-- script that fails half-way is not rolled back. Numbers are passed on as Redis stores them:
-- Lua's are doubles, which repeat above 2^53.

local lock = redis.call('GET', KEYS[1])
local counter = redis.call('GET', KEYS[2])
local seeded_in = redis.call('GET', KEYS[3])

if lock and string.sub(lock, 1, 36) ~= ARGV[1] then
    return {'held', redis.call('PTTL', KEYS[1])}
end

if lock then
    -- The same owner asks again: the answer was lost. It gets the same one, and its time anew.
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    local token = string.match(lock, '^%S+ (%S+)')
    if token == '-' then
        return {'unnumbered', counter or ''}
    end
    return {'granted', token}
end

if counter then
    if not string.match(counter, '^[1-9]%d*$') then
        return redis.error_reply('FENCEROW the token counter is not a positive integer')
    end
    if #counter > 19 or (#counter == 19 and counter >= '9223372036854775807') then
        return redis.error_reply('FENCEROW the token counter is at its end')
    end
end

local token = '-'
-- A process may go on after it was demoted and promoted again; its replication id does not.
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
    .. ':' .. (string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or '')
if counter and seeded_in == run then
    redis.call('INCR', KEYS[2])
    token = redis.call('GET', KEYS[2])
    for _, key in ipairs({KEYS[2], KEYS[3]}) do
        if ARGV[4] == '' then
            -- It may have been given an end by a client that was set up otherwise.
            redis.call('PERSIST', key)
        else
            redis.call('PEXPIRE', key, ARGV[4])
        end
    end
end

local now = redis.call('TIME')
local since = now[1] .. string.format('%03d', math.floor(now[2] / 1000))
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. token .. ' ' .. since .. ' ' .. ARGV[3], 'PX', ARGV[2])
if token == '-' then
    return {'unnumbered', counter or ''}
end
return {'granted', token}

-- Who holds a lock. Reads only.
--
-- KEYS[1]  the lock
--
-- Result   {its value, milliseconds left, or -1 if it has no end}, or nil if it is free

local lock = redis.call('GET', KEYS[1])
if not lock then
    return nil
end
return {lock, redis.call('PTTL', KEYS[1])}

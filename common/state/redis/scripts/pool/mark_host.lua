-- uses: pool
-- Whether, and why, nothing new is placed on a host. Where something may be again, nobody waits for
-- it to be empty any more either.
local before = redis.call('HGET', DRAINING, a.host) or ''
if a.was and before ~= a.was then return cjson.encode({changed = false}) end
if a.why ~= '' then
  redis.call('HSET', DRAINING, a.host, a.why)
else
  redis.call('HDEL', DRAINING, a.host)
  for op, text in pairs(hash(REQUESTS)) do
    local asked = cjson.decode(text)
    if asked.kind == 'drain' and asked.host == a.host then redis.call('HDEL', REQUESTS, op) end
  end
end
local changed = before ~= a.why
if changed then event('host_marked', {host = a.host, why = a.why}) end
return cjson.encode({changed = changed})

-- uses: outage counted doors
-- Prolongs a lease that is still its holder's. One that ended while Redis was away (the caller
-- measured for how long it got no answer) and that nobody took goes on under a raised epoch.
-- A process with a key of its own (`door`) keeps that in its door, loses its lease with it, and is
-- told the number of revocations.
local key = MESH .. ':entry:' .. a.name
local lease = redis.call('HMGET', key, 'token', 'expires_ms', 'epoch', 'gone',
  'incarnation')
local lost = cjson.encode({held = false})
if not lease[1] or tonumber(lease[1]) ~= a.token or lease[4] == '1' then return lost end
local expires, epoch = tonumber(lease[2]), redis.call('GET', MESH .. ':epoch') or '0'
if expires <= NOW then
  if expires + a.away_ms < NOW then return lost end
  if epoch == lease[3] then epoch = raise_epoch(a.away_ms) end
end
if a.door then
  local d = a.door
  if redis.call('HEXISTS', door(d.role, d.host), d.public) == 0 then
    local why = barred(d.host, d.public)
    if why then return cjson.encode({held = false, why = why}) end
  end
  show_key(d)
end
redis.call('HSET', key, 'expires_ms', NOW + a.ttl_ms, 'renewed_ms', NOW, 'stats', a.stats,
  'waits', a.waits, 'epoch', epoch)
redis.call('ZADD', MESH .. ':entries', NOW + a.ttl_ms, a.name)
show_counted(a.name, lease[5], a.counted)
return cjson.encode({held = true, doors = a.door and doors_number() or 0})

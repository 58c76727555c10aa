-- uses: counted
-- Ends a lease at once: the holder leaves (token), or its supervisor saw the process end
-- (incarnation). The entry stays, dead, so that who waited for it can still be told its name.
local key = MESH .. ':entry:' .. a.name
local held = redis.call('HMGET', key, 'incarnation', 'token', 'gone')
local same = held[1] and held[3] ~= '1' and
  (a.token and tonumber(held[2]) == a.token or a.incarnation and held[1] == a.incarnation)
if not same then return cjson.encode({vacated = false}) end
redis.call('HSET', key, 'expires_ms', NOW, 'gone', '1')
redis.call('ZADD', MESH .. ':entries', NOW, a.name)
-- What a host takes is still told of one whose agent has ended.
if string.sub(a.name, 1, 5) ~= 'node/' then redis.call('HDEL', COUNTED, a.name) end
event(a.why, {name = a.name, incarnation = held[1], token = tonumber(held[2])})
return cjson.encode({vacated = true})

-- A new incarnation of a shard takes over its predecessor's segments; from now on only it may note
-- any.
if not holds(a.shard, a.token) then return fenced(a.shard) end
local key = KEYS[1] .. ':shard:' .. a.shard
redis.call('HSET', key, 'owner', a.token)
redis.call('ZADD', KEYS[1] .. ':shards', NOW, a.shard)
local segments = hash(key)
segments.owner, segments.place = nil, nil
return cjson.encode({segments = segments})

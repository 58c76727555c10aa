-- A new incarnation of a shard takes over its predecessor's segments; from now on only it may note
-- any.
if not holds(a.shard, a.token) then return fenced(a.shard) end
local key = KEYS[1] .. ':shard:' .. a.shard
redis.call('HSET', key, 'owner', a.token)
local segments = hash(key)
segments.owner = nil
return cjson.encode({segments = segments})

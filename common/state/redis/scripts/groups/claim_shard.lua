-- A new incarnation of a shard takes over its predecessor's segments; from now on only it may note
-- any.
if not has_lease(args.shard, args.token) then return reject_fenced(args.shard) end
local key = KEYS[1] .. ':shard:' .. args.shard
redis.call('HSET', key, 'owner', args.token)
redis.call('ZADD', KEYS[1] .. ':shards', NOW, args.shard)
local segments = read_hash(key)
segments.owner, segments.place = nil, nil
return cjson.encode({segments = segments})

-- Transfers a shard and its segments to a new incarnation; only this one may record segments from
-- now on. Answers the segments.
if not has_lease(args.shard, args.token) then return reject_fenced(args.shard) end
local key = KEYS[1] .. ':shard:' .. args.shard
redis.call('HSET', key, 'owner', args.token)
redis.call('ZADD', KEYS[1] .. ':shards', NOW, args.shard)
local segments = read_hash(key)
segments.owner, segments.place = nil, nil
return cjson.encode({segments = segments})

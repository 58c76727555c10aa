-- Records a segment file of a shard, with its length once it is sealed. Other forms: `forget`
-- removes a deleted segment, `place` records where the shard stores its segments.
local key = KEYS[1] .. ':shard:' .. args.shard
if not has_lease(args.shard, args.token)
  or tonumber(redis.call('HGET', key, 'owner')) ~= args.token then
  return reject_fenced(args.shard)
end
if args.place then
  redis.call('HSET', key, 'place', args.place)
elseif args.forget then
  redis.call('HDEL', key, 'segment:' .. args.name)
else
  redis.call('HSET', key, 'segment:' .. args.name, args.sealed_length)
end
return cjson.encode({})

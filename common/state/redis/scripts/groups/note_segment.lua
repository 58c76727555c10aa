-- Names a segment file of a shard, or its length once it is sealed, or forgets one that was
-- deleted; or says where its segments lie.
local key = KEYS[1] .. ':shard:' .. a.shard
if not holds(a.shard, a.token) or tonumber(redis.call('HGET', key, 'owner')) ~= a.token then
  return fenced(a.shard)
end
if a.place then
  redis.call('HSET', key, 'place', a.place)
elseif a.forget then
  redis.call('HDEL', key, 'segment:' .. a.name)
else
  redis.call('HSET', key, 'segment:' .. a.name, a.sealed_length)
end
return cjson.encode({})

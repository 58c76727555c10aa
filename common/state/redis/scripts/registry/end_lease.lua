-- uses: snapshot_stats
-- Ends a lease at once: the holder leaves (token), or its supervisor saw the process end
-- (incarnation). The entry stays, dead, so that who waited for it can still be told its name.
local key = MESH .. ':entry:' .. args.name
local held = redis.call('HMGET', key, 'incarnation', 'token', 'is_released')
local same = held[1] and held[3] ~= '1' and
  (args.token and tonumber(held[2]) == args.token
    or args.incarnation and held[1] == args.incarnation)
if not same then return cjson.encode({ended = false}) end
redis.call('HSET', key, 'expires_ms', NOW, 'is_released', '1')
redis.call('ZADD', MESH .. ':entries', NOW, args.name)
-- What a host takes is still told of one whose agent has ended.
if string.sub(args.name, 1, 5) ~= 'node/' then redis.call('HDEL', STATS_SNAPSHOT, args.name) end
append_event(args.event, {name = args.name, incarnation = held[1], token = tonumber(held[2])})
return cjson.encode({ended = true})

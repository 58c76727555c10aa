-- uses: snapshot_stats
-- Ends a lease at once. Callers are its holder (`token`), or the supervisor that saw the process
-- exit (`incarnation`). The entry stays as a dead one, so that waiting processes can still name it.
local key = MESH .. ':entry:' .. args.name
local lease = redis.call('HMGET', key, 'incarnation', 'token', 'is_released')
local is_match = lease[1] and lease[3] ~= '1' and
  (args.token and tonumber(lease[2]) == args.token
    or args.incarnation and lease[1] == args.incarnation)
if not is_match then return cjson.encode({ended = false}) end
redis.call('HSET', key, 'expires_ms', NOW, 'is_released', '1')
redis.call('ZADD', MESH .. ':entries', NOW, args.name)
-- The planner still reads which services a host accepts after its agent has exited.
if string.sub(args.name, 1, 5) ~= 'node/' then redis.call('HDEL', STATS_SNAPSHOT, args.name) end
append_event(args.event, {name = args.name, incarnation = lease[1], token = tonumber(lease[2])})
return cjson.encode({ended = true})

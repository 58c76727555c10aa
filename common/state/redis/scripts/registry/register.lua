-- uses: snapshot_stats
-- A name and its fencing token. The same incarnation keeps its token: its command was sent twice,
-- or it comes back after an outage and nobody took the name.
local key = MESH .. ':entry:' .. args.name
local held = redis.call('HMGET', key, 'incarnation', 'token', 'expires_ms', 'is_released',
  'renewed_ms')
local token
if held[1] == args.incarnation and held[4] ~= '1' then
  token = tonumber(held[2])
elseif held[1] and is_live(held[3], held[5]) then
  return reject('refused', args.name .. ' is held by another process until its lease ends')
else
  token = next_token()
  append_event('registered', {name = args.name, kind = args.kind, incarnation = args.incarnation,
    token = token})
end
redis.call('HSET', key, 'incarnation', args.incarnation, 'token', token,
  'expires_ms', NOW + args.ttl_ms,
  'renewed_ms', NOW, 'about', args.about, 'stats', args.stats, 'waits', args.waits, 'is_released',
  '0',
  'epoch', redis.call('GET', MESH .. ':epoch') or '0')
redis.call('ZADD', MESH .. ':entries', NOW + args.ttl_ms, args.name)
update_stats_snapshot(args.name, args.incarnation, args.snapshot_stats)
return cjson.encode({token = token})

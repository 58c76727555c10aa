-- uses: snapshot_stats
-- Registers a name and answers its fencing token. The same incarnation retains its token: its
-- command was repeated, or it returns after an outage. Rejected while another process has a live
-- lease of the name.
local key = MESH .. ':entry:' .. args.name
local lease = redis.call('HMGET', key, 'incarnation', 'token', 'expires_ms', 'is_released',
  'renewed_ms')
local token
if lease[1] == args.incarnation and lease[4] ~= '1' then
  token = tonumber(lease[2])
elseif lease[1] and is_live(lease[3], lease[5]) then
  return reject('refused', 'another process has the lease of ' .. args.name)
else
  token = next_token()
  append_event('registered', {name = args.name, kind = args.kind, incarnation = args.incarnation,
    token = token})
end
redis.call('HSET', key, 'incarnation', args.incarnation, 'token', token,
  'expires_ms', NOW + args.ttl_ms, 'renewed_ms', NOW, 'about', args.about,
  'stats', args.stats, 'waits', args.waits, 'is_released', '0',
  'epoch', redis.call('GET', MESH .. ':epoch') or '0')
redis.call('ZADD', MESH .. ':entries', NOW + args.ttl_ms, args.name)
update_stats_snapshot(args.name, args.incarnation, args.snapshot_stats)
return cjson.encode({token = token})

-- uses: outage snapshot_stats credentials
-- Prolongs a lease that is still its holder's. One that ended while Redis was away (the caller
-- measured for how long it got no answer) and that nobody took goes on under a raised epoch.
-- A process with a key of its own (`credential`) keeps that in its credentials row, loses its lease
-- with it, and is told the number of revocations.
local key = MESH .. ':entry:' .. args.name
local lease = redis.call('HMGET', key, 'token', 'expires_ms', 'epoch', 'is_released',
  'incarnation')
local lost = cjson.encode({is_renewed = false})
if not lease[1] or tonumber(lease[1]) ~= args.token or lease[4] == '1' then return lost end
local expires, epoch = tonumber(lease[2]), redis.call('GET', MESH .. ':epoch') or '0'
if expires <= NOW then
  if expires + args.away_ms < NOW then return lost end
  if epoch == lease[3] then epoch = raise_epoch(args.away_ms) end
end
if args.credential then
  local credential = args.credential
  if redis.call('HEXISTS', keys_of_role(credential.role, credential.host),
    credential.public_key) == 0 then
    local reason = rejection_reason(credential.host, credential.public_key)
    if reason then return cjson.encode({is_renewed = false, loss_reason = reason}) end
  end
  store_key(credential)
end
redis.call('HSET', key, 'expires_ms', NOW + args.ttl_ms, 'renewed_ms', NOW, 'stats', args.stats,
  'waits', args.waits, 'epoch', epoch)
redis.call('ZADD', MESH .. ':entries', NOW + args.ttl_ms, args.name)
update_stats_snapshot(args.name, lease[5], args.snapshot_stats)
return cjson.encode({is_renewed = true, revocations = args.credential and revocation_count() or 0})

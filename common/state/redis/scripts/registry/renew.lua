-- uses: outage snapshot_stats credentials
-- Renews a lease. A lease that expired in a Redis outage of at most `away_ms` continues under a
-- raised epoch, if its name is still free. With `credential` it also registers the key again, ends
-- the lease if the key is rejected, and answers the number of revocations.
local key = MESH .. ':entry:' .. args.name
local lease = redis.call('HMGET', key, 'token', 'expires_ms', 'epoch', 'is_released',
  'incarnation')
local lost = cjson.encode({is_renewed = false})
if not lease[1] or tonumber(lease[1]) ~= args.token or lease[4] == '1' then return lost end
local expires_ms, epoch = tonumber(lease[2]), redis.call('GET', MESH .. ':epoch') or '0'
if expires_ms <= NOW then
  if expires_ms + args.away_ms < NOW then return lost end
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

-- Renews a leadership that has not expired.
if not is_leader(args.election, args.token) then return cjson.encode({is_renewed = false}) end
redis.call('HSET', MESH .. ':leader:' .. args.election, 'expires_ms', NOW + args.ttl_ms,
  'renewed_ms', NOW)
return cjson.encode({is_renewed = true})

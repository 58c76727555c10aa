-- Prolongs leadership that has not lapsed.
if not leads(a.election, a.token) then return cjson.encode({held = false}) end
redis.call('HSET', MESH .. ':leader:' .. a.election, 'expires_ms', NOW + a.ttl_ms,
  'renewed_ms', NOW)
return cjson.encode({held = true})

-- Leadership of an election for a while: a new token each time that it changes hands or lapsed.
local key = MESH .. ':leader:' .. a.election
local held = redis.call('HMGET', key, 'owner', 'token', 'expires_ms', 'renewed_ms')
local live = held[1] and lasts(held[3], held[4])
if live and held[1] ~= a.owner then return cjson.encode({token = 0}) end
local token = live and tonumber(held[2]) or next_token()
redis.call('HSET', key, 'owner', a.owner, 'token', token, 'expires_ms', NOW + a.ttl_ms,
  'renewed_ms', NOW)
if not live then event('leader', {election = a.election, owner = a.owner, token = token}) end
return cjson.encode({token = token})

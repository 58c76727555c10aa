-- Gives leadership up, so that a standby need not wait for the lease to end.
if leads(a.election, a.token) then
  redis.call('HSET', MESH .. ':leader:' .. a.election, 'expires_ms', NOW)
  event('resigned', {election = a.election, token = a.token})
end
return cjson.encode({})

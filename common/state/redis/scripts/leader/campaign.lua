-- Leadership of an election for a while: a new token each time that it changes hands or lapsed.
local key = MESH .. ':leader:' .. args.election
local held = redis.call('HMGET', key, 'owner', 'token', 'expires_ms', 'renewed_ms')
local live = held[1] and is_live(held[3], held[4])
if live and held[1] ~= args.owner then return cjson.encode({token = 0}) end
local token = live and tonumber(held[2]) or next_token()
redis.call('HSET', key, 'owner', args.owner, 'token', token, 'expires_ms', NOW + args.ttl_ms,
  'renewed_ms', NOW)
if not live then
  append_event('leader', {election = args.election, owner = args.owner, token = token})
end
return cjson.encode({token = token})

-- Grants or renews the leadership of an election for `ttl_ms`. Answers the token, or 0 if another
-- leader is live. The token is new if the leader changes or its lease had expired.
local key = MESH .. ':leader:' .. args.election
local lease = redis.call('HMGET', key, 'owner', 'token', 'expires_ms', 'renewed_ms')
local live = lease[1] and is_live(lease[3], lease[4])
if live and lease[1] ~= args.owner then return cjson.encode({token = 0}) end
local token = live and tonumber(lease[2]) or next_token()
redis.call('HSET', key, 'owner', args.owner, 'token', token, 'expires_ms', NOW + args.ttl_ms,
  'renewed_ms', NOW)
if not live then
  append_event('leader', {election = args.election, owner = args.owner, token = token})
end
return cjson.encode({token = token})

-- uses: counted
-- A name and its fencing token. The same incarnation keeps its token: its command was sent twice,
-- or it comes back after an outage and nobody took the name.
local key = MESH .. ':entry:' .. a.name
local held = redis.call('HMGET', key, 'incarnation', 'token', 'expires_ms', 'gone', 'renewed_ms')
local token
if held[1] == a.incarnation and held[4] ~= '1' then
  token = tonumber(held[2])
elseif held[1] and lasts(held[3], held[5]) then
  return refuse('refused', a.name .. ' is held by another process until its lease ends')
else
  token = next_token()
  event('registered', {name = a.name, kind = a.kind, incarnation = a.incarnation, token = token})
end
redis.call('HSET', key, 'incarnation', a.incarnation, 'token', token, 'expires_ms', NOW + a.ttl_ms,
  'renewed_ms', NOW, 'about', a.about, 'stats', a.stats, 'waits', a.waits, 'gone', '0',
  'epoch', redis.call('GET', MESH .. ':epoch') or '0')
redis.call('ZADD', MESH .. ':entries', NOW + a.ttl_ms, a.name)
show_counted(a.name, a.incarnation, a.counted)
return cjson.encode({token = token})

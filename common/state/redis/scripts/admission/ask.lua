-- What the gateway asks of the launcher, once for an id, and the answer as soon as there is one.
local ASKED, ANSWERED = MESH .. ':asked', MESH .. ':answered:' .. a.id
local answer = redis.call('GET', ANSWERED)
if not answer then
  local row = {id = a.id, kind = a.kind, about = a.about, asked_ms = NOW}
  redis.call('HSETNX', ASKED, a.id, cjson.encode(row))
end
return cjson.encode({answer = answer or ''})

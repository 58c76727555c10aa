-- Submits a request of the gateway to the launcher, once for an id. Answers the launcher's answer,
-- or ''.
local REQUESTS, ANSWER = MESH .. ':host_requests', MESH .. ':host_answers:' .. args.id
local answer = redis.call('GET', ANSWER)
if not answer then
  local row = {id = args.id, kind = args.kind, arguments = args.arguments, requested_ms = NOW}
  redis.call('HSETNX', REQUESTS, args.id, cjson.encode(row))
end
return cjson.encode({answer = answer or ''})

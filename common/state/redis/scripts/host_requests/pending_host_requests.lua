-- Answers the unanswered requests in the order of their submission. Requests older than `waits_ms`
-- are removed: their senders no longer wait.
local REQUESTS = MESH .. ':host_requests'
local pending = {}
for id, text in pairs(read_hash(REQUESTS)) do
  local requested_ms = cjson.decode(text).requested_ms
  if requested_ms < NOW - args.waits_ms then
    redis.call('HDEL', REQUESTS, id)
  else
    pending[#pending + 1] = {at = requested_ms, id = id, text = text}
  end
end
table.sort(pending, function(a, b)
  if a.at ~= b.at then return a.at < b.at end
  return a.id < b.id
end)
local rows = {}
for i, request in ipairs(pending) do rows[i] = request.text end
return cjson.encode({rows = rows})

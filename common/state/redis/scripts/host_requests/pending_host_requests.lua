-- What was asked and has no answer yet, as it was asked: the last word of a host counts. Who asked
-- long ago waits no more.
local REQUESTS = MESH .. ':host_requests'
local found = {}
for id, text in pairs(read_hash(REQUESTS)) do
  local at = cjson.decode(text).requested_ms
  if at < NOW - args.waits_ms then
    redis.call('HDEL', REQUESTS, id)
  else
    found[#found + 1] = {at = at, id = id, text = text}
  end
end
table.sort(found, function(x, y)
  if x.at ~= y.at then return x.at < y.at end
  return x.id < y.id
end)
local rows = {}
for i, one in ipairs(found) do rows[i] = one.text end
return cjson.encode({rows = rows})

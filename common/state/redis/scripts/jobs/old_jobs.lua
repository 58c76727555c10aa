-- Jobs that ended before a time, the oldest of them, and those whose deletion somebody has begun.
if not leads(a.election, a.token) then return fenced('the leader of ' .. a.election) end
local old = {}
for _, job in ipairs(redis.call('ZRANGE', MESH .. ':jobs:ended', 0, a.most - 1)) do
  if tonumber(redis.call('ZSCORE', MESH .. ':jobs:ended', job)) < NOW - a.keep_ms then
    old[#old + 1] = job
  end
end
return cjson.encode({old = old,
  begun = redis.call('ZRANGE', MESH .. ':jobs:deleting', 0, a.most - 1)})

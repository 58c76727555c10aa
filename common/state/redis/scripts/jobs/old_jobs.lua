-- Answers the oldest jobs that ended more than `keep_ms` ago, and jobs whose deletion is
-- unfinished.
if not is_leader(args.election, args.token) then
  return reject_fenced('the leader of ' .. args.election)
end
local old = {}
for _, job in ipairs(redis.call('ZRANGE', MESH .. ':jobs:ended', 0, args.most - 1)) do
  if tonumber(redis.call('ZSCORE', MESH .. ':jobs:ended', job)) < NOW - args.keep_ms then
    old[#old + 1] = job
  end
end
return cjson.encode({old = old,
  unfinished = redis.call('ZRANGE', MESH .. ':jobs:deleting', 0, args.most - 1)})

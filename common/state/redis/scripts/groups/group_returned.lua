-- uses: groups
-- Ends a group that cannot train: by its shard while it is open, or by the trainer that leased it
-- and found it bad, or without anything to teach: then its members that failed are told apart.
local seen = replayed()
if seen then return seen end
if not holds(a.name, a.token) then return fenced(a.name) end
local row = hash(group_key(a.group))
local own = row.state == 'open' and row.shard == a.name
  or row.state == 'leased' and tonumber(row.trainer_token) == a.token
if not own then
  return refuse('refused', 'group ' .. a.group .. ' is not ' .. a.name .. "'s to give back")
end
give_back(a.group, row, a.requeue)
local failed = a.counter == 'filtered' and row.samples - row.scored or 0
count(a.counter, row.samples - failed)
count('typed_drops', failed)
if a.kind == 'stale' then
  event('stale', {job = a.job, version = tonumber(redis.call('HGET', JOB .. ':job', 'version')),
    groups = {{group = a.group, prompt = tonumber(row.prompt), samples = tonumber(row.samples),
      min_version = tonumber(row.min_version)}}})
  return done({returned = true})
end
event(a.kind, {job = a.job, group = a.group, prompt = tonumber(row.prompt),
  samples = row.samples - failed, failed = failed, reason = a.reason, by = a.name})
return done({returned = true})

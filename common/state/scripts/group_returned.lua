-- uses: groups
-- Ends a group that cannot train: by its shard while it is open, or by the trainer that leased it
-- and found it bad.
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
count(a.counter, tonumber(row.samples))
event(a.kind, {job = a.job, group = a.group, prompt = tonumber(row.prompt),
  samples = tonumber(row.samples), reason = a.reason, by = a.name})
return done({returned = true})

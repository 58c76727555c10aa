-- uses: phase
-- The holder of a lease moves its job forward, unless what it says that of is of a lineage that
-- another has taken the place of.
if not holds(a.name, a.token) then return fenced(a.name) end
local was = redis.call('HGET', KEYS[1] .. ':job', 'phase')
if not was then return refuse('not_found', 'there is no job ' .. a.job) end
if not ORDER[a.phase] then return refuse('refused', 'there is no phase ' .. a.phase) end
local left = a.lineage and tonumber(redis.call('HGET', KEYS[1] .. ':job', 'lineage')) ~= a.lineage
if left or was == a.phase then return cjson.encode({changed = false}) end
if ORDER[a.phase] <= ORDER[was] then
  return refuse('refused', a.job .. ' is in phase ' .. was .. ' and cannot go back to ' .. a.phase)
end
enter_phase(a.phase, a.error)
return cjson.encode({changed = true})

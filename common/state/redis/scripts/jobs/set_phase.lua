-- uses: phase
-- The holder of a lease moves its job forward, unless what it says that of is of a lineage that
-- another has taken the place of.
if not has_lease(args.name, args.token) then return reject_fenced(args.name) end
local was = redis.call('HGET', KEYS[1] .. ':job', 'phase')
if not was then return reject('not_found', 'there is no job ' .. args.job) end
if not PHASE_ORDER[args.phase] then return reject('refused', 'there is no phase ' .. args.phase) end
local left = args.lineage
  and tonumber(redis.call('HGET', KEYS[1] .. ':job', 'lineage')) ~= args.lineage
if left or was == args.phase then return cjson.encode({changed = false}) end
if PHASE_ORDER[args.phase] <= PHASE_ORDER[was] then
  return reject('refused', args.job .. ' is in phase ' .. was .. ' and cannot go back to '
    .. args.phase)
end
set_phase(args.phase, args.error)
return cjson.encode({changed = true})

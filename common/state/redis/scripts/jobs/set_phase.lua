-- uses: phase
-- Moves a job to a later phase for the holder of a lease. Answers whether the phase has changed;
-- the request is ignored if it is for another lineage than the current one.
if not has_lease(args.name, args.token) then return reject_fenced(args.name) end
local before = redis.call('HGET', KEYS[1] .. ':job', 'phase')
if not before then return reject('not_found', 'there is no job ' .. args.job) end
if not PHASE_ORDER[args.phase] then return reject('refused', 'there is no phase ' .. args.phase) end
local is_outdated = args.lineage
  and tonumber(redis.call('HGET', KEYS[1] .. ':job', 'lineage')) ~= args.lineage
if is_outdated or before == args.phase then return cjson.encode({changed = false}) end
if PHASE_ORDER[args.phase] <= PHASE_ORDER[before] then
  return reject('refused',
    args.job .. ' is in phase ' .. before .. ' and cannot go back to ' .. args.phase)
end
set_phase(args.phase, args.error)
return cjson.encode({changed = true})

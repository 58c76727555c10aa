-- uses: phase
-- A process has ended unasked: told as an event, kept as the last end of its name, and charged to
-- its job, which fails by an error that no restart mends. Who tells it needs no lease: that it has
-- ended stays true.
local seen = replayed()
if seen then return seen end
local SAME = 3 -- ends by one error without a step in between: to start again does not help
local KEY = MESH .. ':ended'
local known = redis.call('HGET', KEY, a.name)
local row = known and cjson.decode(known) or {times = 0, same = 0, cause = '', progress = ''}
local job = {}
if a.job ~= '' then job = hash(KEYS[1] .. ':job') end
local goes_on = job.phase and ORDER[job.phase] < 5
if job.phase and not goes_on and a.restart ~= 'never' then -- it follows from its job's end
  return done({failed = false})
end

row.name, row.job, row.code, row.why = a.name, a.job, a.code, a.why
row.at_ms, row.final, row.log = NOW, a.final, a.log
if a.event then row.times = row.times + 1 end -- else it was counted when it was told
row.error = a.error
local cause = a.error.type .. ' ' .. a.error.where
if a.event and a.error.type ~= '' and a.restart ~= 'always' then
  local progress = a.job .. ' ' .. (job.phase or '') .. ' ' .. (job.lineage or '') .. ' '
    .. (job.steps_done or '')
  local again = row.cause == cause and row.progress == progress
  row.same = again and row.same + 1 or 1
  row.cause, row.progress = cause, progress
end
local fails = goes_on and a.error.type ~= ''
  and (a.restart == 'never'
    or (a.restart == 'counted' and (a.spent or row.same >= SAME)))
if fails then row.same = 0 end
redis.call('HSET', KEY, a.name, cjson.encode(row))
if a.event then
  event('process_ended', {name = a.name, code = a.code, why = a.why, job = a.job, times = row.times,
    final = a.final, log = a.log, error = a.error})
end
if fails then enter_phase('failed', a.told) end
return done({failed = fails and true or false})

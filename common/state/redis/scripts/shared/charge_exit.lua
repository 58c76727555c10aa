-- uses: phase exits
-- A process has ended unasked: told as an event, kept as the last end of its name, and charged to
-- its job, which fails by an error that no restart mends, and by any other that comes again and
-- again while the job makes no progress. Who tells it needs no lease: that it has ended stays true.
local seen = previous_reply()
if seen then return seen end
-- Ends of one cause, and the milliseconds that they must have lasted, until the job fails by them.
local BOUNDS = {
  -- An error of its own: to start it again does not help, unless it is of what a predecessor that
  -- is still going away holds, such as a port or a device's memory.
  counted = {3, 10000},
  crash = {6, 30000}, -- a signal, or no word, soon after its start: it may be unable to succeed
  killed = {6, 1800000}, -- one that had come up: a machine that is taken away now and then
  patient = {5, 600000}, -- a lost peer or lease: over when the other process is back
}
local UP_S = 30 -- a process that ran for so long had come up
-- What others may have done is borne for some of the job's slowest steps, or groups: where one
-- takes 20 minutes, 10 without one tell nothing. A process that crashes as it starts is no matter
-- of steps.
local SLOWER, SOON = 3, 600000
local ANY = {20, 600000} -- ends of whatever causes
local CAUSES = 16 -- that are message apart
local row = read_last_exit()
local job = {}
if args.job ~= '' then job = read_hash(KEYS[1] .. ':job') end
local goes_on = job.phase and PHASE_ORDER[job.phase] < 5
if job.phase and not goes_on and args.restart ~= 'never' then -- it follows from its job's end
  return reply({failed = false})
end

-- While a disk is full or Redis is away nothing can succeed, and waiting is right.
local function has_outage()
  local entries = MESH .. ':entries'
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', entries, NOW, '+inf')) do
    local waits = redis.call('HGET', MESH .. ':entry:' .. name, 'waits') or ''
    if string.find(waits, '"what": "room ', 1, true) then return true end
  end
  return false
end

local function extend_streak(streak)
  streak = streak or {n = 0, since = NOW}
  streak.n = streak.n + 1
  return streak
end

local slowest = SLOWER * tonumber(job.slowest_progress_ms or 0)
local function exceeds_bound(streak, kind, bound)
  local least = bound[2]
  if kind == 'crash' then least = math.max(least, math.min(slowest, SOON))
  elseif kind ~= 'counted' then least = math.max(least, slowest) end
  return streak.n >= bound[1] and NOW - streak.since >= least
end

if args.restart == 'always' then redis.call('SET', MESH .. ':outage_ms', NOW) end
-- A job that is held makes no progress by intention; once it goes on it is judged anew.
local held = (job.block_reason or '') ~= ''
local progress = args.job .. ' ' .. (job.phase or '') .. ' ' .. (job.progress or '') .. ' '
  .. (redis.call('GET', MESH .. ':outage_ms') or '') .. ' ' .. (job.resumed or '')
if row.progress ~= progress or not row.causes then
  row.progress, row.causes, row.cause_count, row.all = progress, {}, 0, nil
end
local kind, streak = args.restart, nil
if kind == 'crash' and args.run_time_s >= UP_S then kind = 'killed' end
local bound = BOUNDS[kind]
if args.emit_event and bound and args.charge_job and not held then
  local cause = args.error.type .. ' ' .. args.error.where
  if args.error.type == '' then cause = args.why end
  if kind == 'killed' then
    row.causes[cause], row.all = nil, nil -- that it came up shows that it can
    cause = 'killed ' .. cause
  end
  if not row.causes[cause] then
    row.cause_count = row.cause_count + 1
    if row.cause_count > CAUSES then row.causes, row.cause_count = {}, 1 end
  end
  row.causes[cause] = extend_streak(row.causes[cause])
  if kind ~= 'killed' then row.all = extend_streak(row.all) end
  if exceeds_bound(row.causes[cause], kind, bound) then streak = row.causes[cause]
  elseif row.all and exceeds_bound(row.all, 'any', ANY) then streak = row.all end
end
local lasting = streak and args.restart ~= 'counted'
local fails = goes_on and (args.restart == 'never'
  or (args.restart == 'counted' and args.is_budget_exhausted)
  or (streak and not (lasting and has_outage())))
local message = args.message
if fails and lasting then
  message = message ..
  string.format(' (%d ends in %d s, without a group, step or evaluation of the job)',
    streak.n, math.floor((NOW - streak.since) / 1000))
end
if fails then row.causes, row.cause_count, row.all = {}, 0, nil end
record_exit(row)
if fails then set_phase('failed', message .. args.advice) end
return reply({failed = fails and true or false})

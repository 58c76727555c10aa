-- uses: phase exits
-- Records an unexpected exit of a process, as an event and as its last exit, and charges it to its
-- job. Answers whether the job has failed. It fails by an error that no restart fixes, and by
-- repeated errors without progress. The reporter needs no lease: an exit stays true.
local previous = previous_reply()
if previous then return previous end
-- Number of exits by one cause, and their minimum duration in ms, that fail the job.
local BOUNDS = {
  -- An error of its own: a restart does not help, unless an exiting predecessor still holds a port
  -- or a device's memory.
  counted = {3, 10000},
  crash = {6, 30000}, -- a signal or no error, soon after its start: it may never succeed
  killed = {6, 1800000}, -- a signal after a successful start: a machine that is reclaimed at times
  patient = {5, 600000}, -- a lost peer or lease: it ends when the other process is back
}
local STARTED_S = 30 -- a process that ran for so long had started successfully
-- Faults of other processes are tolerated for some of the job's slowest steps or groups. If a step
-- takes 20 minutes, ten minutes without one prove nothing. A crash at the start does not depend on
-- steps.
local PROGRESS_FACTOR, MAX_CRASH_WAIT_MS = 3, 600000
local ANY_CAUSE_BOUND = {20, 600000} -- exits by any cause
local MAX_CAUSES = 16 -- causes that are counted separately
local row = read_last_exit()
local job = {}
if args.job ~= '' then job = read_hash(KEYS[1] .. ':job') end
local is_active = job.phase and PHASE_ORDER[job.phase] < 5
if job.phase and not is_active and args.restart ~= 'never' then -- it follows from the job's end
  return reply({failed = false})
end

-- A job is not failed while a disk is full or Redis is unavailable: nothing can succeed then.
local function has_outage()
  local index = MESH .. ':entries'
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', index, NOW, '+inf')) do
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

local progress_wait_ms = PROGRESS_FACTOR * tonumber(job.slowest_progress_ms or 0)
local function exceeds_bound(streak, kind, bound)
  local min_ms = bound[2]
  if kind == 'crash' then min_ms = math.max(min_ms, math.min(progress_wait_ms, MAX_CRASH_WAIT_MS))
  elseif kind ~= 'counted' then min_ms = math.max(min_ms, progress_wait_ms) end
  return streak.n >= bound[1] and NOW - streak.since >= min_ms
end

if args.restart == 'always' then redis.call('SET', MESH .. ':outage_ms', NOW) end
-- A blocked job makes no progress by intention; its streaks start again when it is resumed.
local is_blocked = (job.block_reason or '') ~= ''
local progress = args.job .. ' ' .. (job.phase or '') .. ' ' .. (job.progress or '') .. ' '
  .. (redis.call('GET', MESH .. ':outage_ms') or '') .. ' ' .. (job.resumed or '')
if row.progress ~= progress or not row.causes then
  row.progress, row.causes, row.cause_count, row.all = progress, {}, 0, nil
end
local kind, streak = args.restart, nil
if kind == 'crash' and args.run_time_s >= STARTED_S then kind = 'killed' end
local bound = BOUNDS[kind]
if args.emit_event and bound and args.charge_job and not is_blocked then
  local cause = args.error.type .. ' ' .. args.error.where
  if args.error.type == '' then cause = args.why end
  if kind == 'killed' then
    row.causes[cause], row.all = nil, nil -- its start shows that it can succeed
    cause = 'killed ' .. cause
  end
  if not row.causes[cause] then
    row.cause_count = row.cause_count + 1
    if row.cause_count > MAX_CAUSES then row.causes, row.cause_count = {}, 1 end
  end
  row.causes[cause] = extend_streak(row.causes[cause])
  if kind ~= 'killed' then row.all = extend_streak(row.all) end
  if exceeds_bound(row.causes[cause], kind, bound) then streak = row.causes[cause]
  elseif row.all and exceeds_bound(row.all, 'any', ANY_CAUSE_BOUND) then streak = row.all end
end
local is_transient = streak and args.restart ~= 'counted'
local fails = is_active and (args.restart == 'never'
  or (args.restart == 'counted' and args.is_budget_exhausted)
  or (streak and not (is_transient and has_outage())))
local message = args.message
if fails and is_transient then
  message = message .. string.format(
    ' (%d ends in %d s, without a group, step or evaluation of the job)', streak.n,
    math.floor((NOW - streak.since) / 1000))
end
if fails then row.causes, row.cause_count, row.all = {}, 0, nil end
record_exit(row)
if fails then set_phase('failed', message .. args.advice) end
return reply({failed = fails and true or false})

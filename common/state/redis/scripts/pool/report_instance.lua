-- uses: pool
-- Records a worker's report on its rank's process of an instance. Answers whether it was accepted:
-- a report for another generation, epoch or rank changes nothing. The instance's phase is that of
-- its least advanced rank.
local name = worker_name(args.worker)
if not has_lease(name, args.token) then return reject_fenced(name) end
local key, field = GANG .. args.gang, 'report:' .. args.instance .. ':' .. args.rank
local row = redis.call('HMGET', key, 'workers', 'instance:' .. args.instance, field)
if not row[2] or cjson.decode(row[1])[args.rank + 1] ~= args.worker then
  return cjson.encode({accepted = false})
end
local desired = cjson.decode(row[2])
if desired.generation ~= args.generation or desired.epoch ~= args.epoch then
  return cjson.encode({accepted = false})
end
if row[3] == args.report then return cjson.encode({accepted = true}) end

local SEVERITY = {gone = 0, ready = 1, moving = 2, starting = 3, draining = 4, failed = 5}

local function summarize_instance()
  local worst, phase, tier, detail = -1, 'starting', desired.tier, ''
  for _, rank in ipairs(desired.ranks) do
    local text = redis.call('HGET', key, 'report:' .. args.instance .. ':' .. rank)
    local report = text and cjson.decode(text)
    if not report or report.generation ~= desired.generation or report.epoch ~= desired.epoch then
      report = {phase = 'starting', tier = report and report.tier or 'absent', detail = ''}
    end
    if SEVERITY[report.phase] > worst then
      worst, phase, tier, detail = SEVERITY[report.phase], report.phase, report.tier, report.detail
    end
  end
  return phase, tier, detail
end

local phase, tier, detail = summarize_instance()
redis.call('HSET', key, field, args.report)
update_gang_snapshot(args.gang)
local now_phase, now_tier, now_detail = summarize_instance()
if not row[3] or phase ~= now_phase or tier ~= now_tier or detail ~= now_detail then
  append_event('actual', {gang = args.gang, resident = args.instance, job = desired.job,
    role = desired.role, status = now_phase, tier = now_tier, generation = args.generation,
    epoch = args.epoch, detail = now_detail})
end
return cjson.encode({accepted = true})

-- Cursors of who reads the event stream: a reader's name -> {cursor: where it continues, done: up
-- to where it has everything, location, joined_ms, last_seen_ms, has_left}.
local READERS, EVENTS, TRIMMED = MESH .. ':readers', MESH .. ':events', MESH .. ':trimmed'

local function parse_id(id)
  local ms, seq = string.match(id, '^(%d+)%-?(%d*)$')
  return tonumber(ms), tonumber(seq) or 0
end

local function is_before(one, other)
  local ms, seq = parse_id(one)
  local its_ms, its_seq = parse_id(other)
  return ms < its_ms or ms == its_ms and seq < its_seq
end

local function read_reader(name)
  local row = redis.call('HGET', READERS, name)
  return row and cjson.decode(row)
end

local function write_reader(name, row) redis.call('HSET', READERS, name, cjson.encode(row)) end

-- Whoever records the job reads from the event `id` on: nothing from there on is trimmed before it
-- comes. Nothing of the job has happened since it left, so that it may miss what lies between.
local function retain_for_recorder(job, id)
  local name = 'recorder/' .. job
  local row = read_reader(name) or {done = '0-0', location = '', joined_ms = NOW}
  local ms = parse_id(id)
  row.cursor, row.last_seen_ms = string.format('%.0f-0', ms - 1), NOW
  row.has_left, row.step = nil, 0
  write_reader(name, row)
end

-- Steps after `version` are made again, in another lineage: their rows are not recorded yet.
local function reset_recorded_steps(job, version)
  local name = 'recorder/' .. job
  local row = read_reader(name)
  if not row or (row.step or 0) <= version then return end
  row.step = version
  write_reader(name, row)
end

-- Cursors of the readers of the event stream, by name. A row is {cursor: id to continue from, done:
-- id up to which the reader has saved everything, location, joined_ms, last_seen_ms, has_left}.
local READERS, EVENTS, TRIMMED = MESH .. ':readers', MESH .. ':events', MESH .. ':trimmed'

local function parse_id(id)
  local ms, seq = string.match(id, '^(%d+)%-?(%d*)$')
  return tonumber(ms), tonumber(seq) or 0
end

local function is_before(one, other)
  local ms, seq = parse_id(one)
  local other_ms, other_seq = parse_id(other)
  return ms < other_ms or ms == other_ms and seq < other_seq
end

local function read_reader(name)
  local row = redis.call('HGET', READERS, name)
  return row and cjson.decode(row)
end

local function write_reader(name, row) redis.call('HSET', READERS, name, cjson.encode(row)) end

-- Moves the cursor of the job's recorder to event `id`. Nothing from there on is trimmed before a
-- recorder joins. Nothing happened to the job since its last recorder left, so the recorder may
-- skip the events in between.
local function retain_for_recorder(job, id)
  local name = 'recorder/' .. job
  local row = read_reader(name) or {done = '0-0', location = '', joined_ms = NOW}
  local ms = parse_id(id)
  row.cursor, row.last_seen_ms = string.format('%.0f-0', ms - 1), NOW
  row.has_left, row.step = nil, 0
  write_reader(name, row)
end

-- Makes the recorder record the steps after `version` again: another lineage repeats them.
local function reset_recorded_steps(job, version)
  local name = 'recorder/' .. job
  local row = read_reader(name)
  if not row or (row.step or 0) <= version then return end
  row.step = version
  write_reader(name, row)
end

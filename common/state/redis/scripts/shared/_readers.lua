-- Cursors of who reads the event stream: a reader's name -> {at: where it goes on, done: up to
-- where it has everything, where, since_ms, seen_ms, left}.
local READERS, EVENTS, TRIMMED = MESH .. ':readers', MESH .. ':events', MESH .. ':trimmed'

local function parts_of(id)
  local ms, seq = string.match(id, '^(%d+)%-?(%d*)$')
  return tonumber(ms), tonumber(seq) or 0
end

local function below(one, other)
  local ms, seq = parts_of(one)
  local its_ms, its_seq = parts_of(other)
  return ms < its_ms or ms == its_ms and seq < its_seq
end

local function reader(name)
  local row = redis.call('HGET', READERS, name)
  return row and cjson.decode(row)
end

local function keep_reader(name, row) redis.call('HSET', READERS, name, cjson.encode(row)) end

-- Whoever records the job reads from the event `id` on: nothing from there on is trimmed before it
-- comes. Nothing of the job has happened since it left, so that it may miss what lies between.
local function await_recorder(job, id)
  local name = 'recorder/' .. job
  local row = reader(name) or {done = '0-0', where = '', since_ms = NOW}
  local ms = parts_of(id)
  row.at, row.seen_ms, row.left, row.step = string.format('%.0f-0', ms - 1), NOW, nil, 0
  keep_reader(name, row)
end

-- Steps after `version` are made again, in another lineage: their rows are not recorded yet.
local function unrecord(job, version)
  local name = 'recorder/' .. job
  local row = reader(name)
  if not row or (row.step or 0) <= version then return end
  row.step = version
  keep_reader(name, row)
end

-- Commands on streams: entries in the order of their ids, each {id, {field, value, ...}}. Ids are
-- unique, even after a trim.
local parts = ...

local command, fail, fail_unsupported = parts.command, parts.fail, parts.fail_unsupported
local value, parse_integer = parts.value, parts.parse_integer
local floor, format, huge = math.floor, string.format, math.huge
local match, sub, upper = string.match, string.sub, string.upper

command('XADD', -5, 'wm', function(space, args, n)
  local own_ms, own_seq = match(args[3], '^(%d+)%-(%d+)$')
  if args[3] ~= '*' and not own_ms then fail_unsupported('XADD with ' .. args[3]) end
  if n % 2 == 0 then fail("ERR wrong number of arguments for 'xadd' command") end
  local stream = value(space, args[2], 'stream')
  if not stream then
    stream = {kind = 'stream', entries = {}, ms = {}, seq = {}, n = 0, last_ms = 0, last_seq = 0}
    space.keys[args[2]] = stream
  end
  local last, ms, seq = stream.n, space.now_ms, 0
  if own_ms then
    ms, seq = tonumber(own_ms), tonumber(own_seq)
    if ms < stream.last_ms or ms == stream.last_ms and seq <= stream.last_seq then
      fail('ERR The ID specified in XADD is equal or smaller than the target stream top item')
    end
  elseif stream.last_ms >= ms then -- ids increase even if the clock does not
    ms, seq = stream.last_ms, stream.last_seq + 1
  end
  stream.last_ms, stream.last_seq = ms, seq
  local id, fields = format('%.0f-%.0f', ms, seq), {}
  for i = 4, n do fields[i - 3] = args[i] end
  last = last + 1
  stream.entries[last], stream.ms[last], stream.seq[last], stream.n = {id, fields}, ms, seq, last
  return id
end)

-- Parses a bound of a range: its time in ms, its sequence number, and whether it is exclusive.
local function bound(text, default_seq)
  if text == '-' then return 0, 0, false end
  if text == '+' then return huge, huge, false end
  local open = sub(text, 1, 1) == '('
  local ms, seq = match(text, open and '^%((%d+)%-(%d+)$' or '^(%d+)%-(%d+)$')
  if not ms then
    ms, seq = match(text, open and '^%((%d+)$' or '^(%d+)$'), nil
    if not ms then fail('ERR Invalid stream ID specified as stream command argument') end
  end
  return tonumber(ms), seq and tonumber(seq) or default_seq, open
end

-- Returns the number of entries before (ms, seq); `through` includes the entry itself.
local function count_before(stream, ms, seq, through)
  local low, high = 1, stream.n + 1
  while low < high do
    local middle = floor((low + high) / 2)
    local its_ms, its_seq = stream.ms[middle], stream.seq[middle]
    if its_ms < ms or its_ms == ms and (its_seq < seq or through and its_seq == seq) then
      low = middle + 1
    else
      high = middle
    end
  end
  return low - 1
end

local function range(space, args, n, from, to, step)
  local most = huge
  if n == 6 and upper(args[5]) == 'COUNT' then
    most = parse_integer(args[6])
    if most < 1 then fail_unsupported(args[1] .. ' with COUNT ' .. args[6]) end
  elseif n ~= 4 then
    fail('ERR syntax error')
  end
  local low_ms, low_seq, above = bound(from, 0)
  local high_ms, high_seq, below = bound(to, huge)
  local stream = value(space, args[2], 'stream')
  local found = {}
  if not stream then return found end
  local first = count_before(stream, low_ms, low_seq, above) + 1
  local last = count_before(stream, high_ms, high_seq, not below)
  if step < 0 then first, last = last, first end
  for i = first, last, step do
    if #found == most then break end
    found[#found + 1] = stream.entries[i]
  end
  return found
end

-- Replies share the entries' tables, because scripts do not modify them.
command('XRANGE', -4, '', function(space, args, n)
  return range(space, args, n, args[3], args[4], 1)
end)

command('XREVRANGE', -4, '', function(space, args, n)
  return range(space, args, n, args[4], args[3], -1)
end)

-- Removes the first `removed` entries and returns their number.
local function trim(stream, removed)
  if removed <= 0 then return 0 end
  local entries, its_ms, its_seq = {}, {}, {}
  for i = removed + 1, stream.n do
    entries[i - removed], its_ms[i - removed] = stream.entries[i], stream.ms[i]
    its_seq[i - removed] = stream.seq[i]
  end
  stream.entries, stream.ms, stream.seq, stream.n = entries, its_ms, its_seq, stream.n - removed
  return removed
end

command('XTRIM', -4, 'w', function(space, args, n)
  if upper(args[3]) ~= 'MINID' or n ~= 4 then
    fail_unsupported('XTRIM other than with MINID alone')
  end
  local ms, seq, open = bound(args[4], 0)
  if open or ms == huge then fail('ERR Invalid stream ID specified as stream command argument') end
  local stream = value(space, args[2], 'stream')
  return stream and trim(stream, count_before(stream, ms, seq, false)) or 0
end)

command('XLEN', 2, '', function(space, args)
  local stream = value(space, args[2], 'stream')
  return stream and stream.n or 0
end)
